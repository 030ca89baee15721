"""What cannot be imported here."""

raise OSError("libsquare.so.1: cannot open shared object file")
