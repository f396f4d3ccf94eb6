"""Protection against damaged or untrusted files."""
