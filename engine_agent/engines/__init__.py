"""Engines that can be served from: the interface of an engine, and a folder for each kind."""
