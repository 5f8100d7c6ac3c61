"""The engines a backend can run, each behind `backend_service.engines.base.Engine`."""
