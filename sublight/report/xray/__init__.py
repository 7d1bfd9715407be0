"""What `xray` shows: terminal and HTML."""
