"""
All parts of judging except the local model: rubrics, replies, human labels, and judges on servers.
"""
