"""The commands of the command line that are a world of their own, one file each; `cli` puts them together."""
