"""Task + Offers -> Plan, pure."""
