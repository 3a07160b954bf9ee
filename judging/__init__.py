"""The parts of a judge besides its model: rubrics, labels, replies and judges on a server."""
