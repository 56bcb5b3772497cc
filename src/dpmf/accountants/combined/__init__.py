"""The accountants that take the least of other accountants' bounds: `best` and `auto`."""
