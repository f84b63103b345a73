"""Small modules that any folder may import: errors, options, safe text and JSON, files, memory, child processes, lazy imports."""
