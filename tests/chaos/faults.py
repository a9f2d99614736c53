"""All kinds of faults."""

from __future__ import annotations

from tests.chaos import faults_of_clients, faults_of_processes, faults_of_resources, faults_of_servers
from tests.chaos.strikes import KINDS, Kind, NotNow, Scene, Strike, deck

__all__ = [
    "KINDS",
    "Kind",
    "NotNow",
    "Scene",
    "Strike",
    "deck",
    "faults_of_clients",
    "faults_of_processes",
    "faults_of_resources",
    "faults_of_servers",
]
