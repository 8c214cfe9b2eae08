"""`broker server up`: a server of this installation on another machine, from its creation to its end."""
