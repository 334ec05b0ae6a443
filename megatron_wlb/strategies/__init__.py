"""Strategies (Hydraulis): replicas of unlike layouts, which follow the documents of each step.

``plan`` proposes, assigns and costs them, without torch; ``run`` runs them.
"""
