"""The sidecar process: driver, threads, records on disk, monitoring."""
