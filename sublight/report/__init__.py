"""Records in, text and pictures out; nothing here measures."""
