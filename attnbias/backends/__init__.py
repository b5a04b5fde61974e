"""One adapter for each way of computing attention."""
