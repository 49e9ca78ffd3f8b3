"""Parts of both servers, the prediction service and the proxy: process, logs, HTTP port."""
