"""Documentation of the registered methods: metadata read from the code, and Markdown pages."""
