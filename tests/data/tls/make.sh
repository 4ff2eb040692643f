#!/bin/sh
# Makes the certificate that test servers on 127.0.0.1 show; it vouches for itself, for a hundred years.
cd "$(dirname "$0")" || exit 1
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=localhost \
	-addext subjectAltName=IP:127.0.0.1,DNS:localhost -addext basicConstraints=critical,CA:TRUE \
	-keyout server.key -out server.pem
