"""Records to tables, figures and one HTML page."""
