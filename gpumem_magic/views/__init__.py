"""What a report looks like: sentences, text, HTML, pictures, and the colours and names that all of them share."""
