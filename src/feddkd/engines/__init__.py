"""Engines compute the exchanges at the clients: one client after another, as one program, or in
several processes.
"""
