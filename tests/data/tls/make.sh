#!/bin/sh
# Makes the certificates that tests show on 127.0.0.1; each vouches for itself, for a hundred years. Those that are
# there already stay: sh make.sh; to renew one, delete it first.
cd "$(dirname "$0")" || exit 1
for name in server other; do
	[ -e "$name.pem" ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 \
		-subj "/CN=$name" -addext subjectAltName=IP:127.0.0.1,DNS:localhost \
		-addext basicConstraints=critical,CA:TRUE -keyout "$name.key" -out "$name.pem"
done
