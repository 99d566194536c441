"""What the faces share: the device that is chosen, the recording under way, the last report, and `measure`."""
