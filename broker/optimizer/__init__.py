"""Rank offers for a task: Task + Offers -> Plan. Pure: no I/O, no clock."""
