"""The search: candidates in order of their bounds, ever closer looks at the best, and a certificate over all."""

from planner.constraints_text import parse_pins
from planner.search.request import Certificate, Request, SearchResult
from planner.search.search import search

__all__ = ["Certificate", "Request", "SearchResult", "parse_pins", "search"]
