"""One HTML page about runs that needs nothing else: no network and no other file.

verdicts        who won, by how much, and whether that is significant
chart_data      the numbers behind the charts
provenance      what was run, by which command, with which versions
page.html, page.css, page.js   how it is laid out and drawn
plotly-cartesian.min.js        plotly.js, which draws the charts
"""
