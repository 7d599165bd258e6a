"""How our processes conduct themselves: which packages they import, what interrupts them, where output goes."""
