"""A store for processes on other hosts: its owner, which has the file, and the store of a process that asks
it."""
