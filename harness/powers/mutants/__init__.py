"""The mutation score: which of the catalogue's faults a case notices, and how many causes are right."""
