"""Small modules that any folder may import: errors, options, text and JSON, files, memory, child processes."""
