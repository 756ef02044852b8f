"""`weightbus trainer-agent` (a watched folder) and `weightbus rollback`, with their settings."""
