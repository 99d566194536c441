"""Reports and recordings as files: a report's JSON, snapshot files that become reports, recordings saved as snapshots."""
