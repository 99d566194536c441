"""What every device, real or virtual, can be asked."""
