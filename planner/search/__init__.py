"""The search: candidates in order of their bounds, each solved as an ILP over columns, and a certificate over all."""

from planner.search.pins import Pins, parse_pins
from planner.search.request import Certificate, Request, SearchResult
from planner.search.search import search

__all__ = ["Certificate", "Pins", "Request", "SearchResult", "parse_pins", "search"]
