"""The engine agent: a sidecar that takes new weights into one inference server, and its code in the server's workers.

README.md has the rooms in order of reading and the path of a command through them.
"""
