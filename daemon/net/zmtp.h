/* ZMTP 3 with the NULL mechanism: what ZeroMQ's DEALER speaks on a stream socket, as far as its
 * ROUTER has to. Pure: bytes in, a verdict out.
 *
 * Each side sends a greeting of 64 bytes, then a READY command that names its kind of socket, then
 * messages. All that follows the greeting is frames: a byte of flags, a length of 1 or 8 bytes, and
 * as many bytes. https://rfc.zeromq.org/spec/23
 */
#ifndef SHD_ZMTP_H
#define SHD_ZMTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define ZMTP_GREETING_BYTES   64u
#define ZMTP_HEADER_BYTES_MAX 9u
#define ZMTP_OPENING_BYTES    94u /* greeting and READY */

/* What a ROUTER says, all of it before it has heard anything. */
void zmtp_opening(uint8_t bytes[ZMTP_OPENING_BYTES]);

/* Whether a peer's greeting is one of ZMTP 3 without security. SHD_EPROTO. */
int zmtp_greeting_check(const uint8_t greeting[ZMTP_GREETING_BYTES], struct shd_err *e);

/* Whether a command's body is READY of a socket that a ROUTER talks to. SHD_EPROTO. */
int zmtp_ready_check(const uint8_t *body, size_t bytes, struct shd_err *e);

struct zmtp_frame {
    bool more; /* its message has further frames */
    bool command;
    size_t header_bytes;
    uint64_t bytes; /* of its body: untrusted */
};

/* The frame whose first bytes these are. SHD_PENDING: its header is not complete; SHD_EPROTO. */
int zmtp_header(const uint8_t *data, size_t bytes, struct zmtp_frame *ret_frame, struct shd_err *e);

/* The header of a message of one frame. Returns its size. */
size_t zmtp_header_write(uint8_t header[ZMTP_HEADER_BYTES_MAX], size_t body_bytes);

#endif
