"""The built-in worlds. Each is an entry point of the group `deltawire.worlds`."""
