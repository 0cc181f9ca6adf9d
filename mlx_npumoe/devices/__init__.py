"""Second devices that run expert programs: the interpreter (any machine) and the null device (measures our own cost)."""
