"""
Functions for text: parsing JSON, YAML and function arguments, and printing text safely.

Other functions build the commands that messages show, wrap lines, and explain setting names of TRL.
"""
