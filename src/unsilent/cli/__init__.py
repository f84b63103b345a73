"""The command line of the package, with a module for each command."""
