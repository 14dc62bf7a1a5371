"""Text to values and back: `name(option=value) | name()` is parsed, checked and written out.

registry: factories by name; parser: text to names and arguments; types: values of options;
schedules: values that change with the round.
"""
