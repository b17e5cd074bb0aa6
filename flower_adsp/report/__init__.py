"""Figures and a page about one run or several, made from the files that runs leave."""
