"""machine: see FACES.md for the sentence that belongs here."""
