"""Resources of the host: private files, shared memory, sockets, threads."""
