"""Text to values and back:

`name(option=value) | name()` is parsed, checked and spelled canonically; values of options.
"""
