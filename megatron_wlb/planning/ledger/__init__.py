"""Which documents ran at which step: the file of it, and the audit that proves it."""
