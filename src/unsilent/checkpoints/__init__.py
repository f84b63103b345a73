"""Checkpoint files: which bytes are which element, editing them in place, undoing it, and comparing what files hold."""
