"""Services: replicas behind a balancer. A replica is a managed job; the balancer is a separate process."""
