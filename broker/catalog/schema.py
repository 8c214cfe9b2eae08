"""The schema of the price book, shared by writer and reader."""

from __future__ import annotations

SCHEMA_VERSION = 3
ARCHIVE = "book.db.xz"

# Texts are stored once and referenced by number; prices are USD per instance-hour, memory is GiB. `clouds` has the age
# of each cloud's prices, as ISO dates, and their source; an offer with other dates has its own.
TABLES = """
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE types (
    id INTEGER PRIMARY KEY, cloud TEXT NOT NULL, instance_type TEXT NOT NULL, vcpus REAL NOT NULL,
    memory_gib REAL NOT NULL,
    accelerator TEXT, accelerator_count REAL NOT NULL, accelerator_memory_gib REAL NOT NULL, arch TEXT NOT NULL
);
CREATE TABLE offers (
    type INTEGER NOT NULL, region INTEGER NOT NULL, zone INTEGER, ondemand_usd_hour REAL, spot_usd_hour REAL,
    interruption_band REAL, is_estimated INTEGER NOT NULL, ondemand_as_of TEXT, spot_as_of TEXT
);
CREATE TABLE accelerators (
    name TEXT PRIMARY KEY, memory_gib REAL NOT NULL, bf16_dense_tflops REAL, fp32_tflops REAL,
    memory_bandwidth_gbs REAL, nvlink_gbs REAL
);
CREATE TABLE egress (cloud TEXT NOT NULL, from_region TEXT NOT NULL, target TEXT NOT NULL, usd_per_gb REAL NOT NULL);
CREATE TABLE clouds (
    cloud TEXT PRIMARY KEY, ondemand_as_of TEXT NOT NULL, spot_as_of TEXT NOT NULL, source TEXT NOT NULL
);
"""
# Created when the book is unpacked: the archive omits them.
INDEXES = """
CREATE INDEX IF NOT EXISTS types_by_accelerator ON types (accelerator, accelerator_count);
CREATE INDEX IF NOT EXISTS types_by_name ON types (instance_type);
CREATE INDEX IF NOT EXISTS offers_by_type ON offers (type, region);
CREATE INDEX IF NOT EXISTS offers_by_ondemand ON offers (ondemand_usd_hour, type) WHERE ondemand_usd_hour IS NOT NULL;
CREATE INDEX IF NOT EXISTS offers_by_spot ON offers (spot_usd_hour, type) WHERE spot_usd_hour IS NOT NULL;
"""
