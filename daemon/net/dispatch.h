/* From a frame to its handler: the table says which it is, and who may send the request. */
#ifndef SHD_DISPATCH_H
#define SHD_DISPATCH_H

#include <stddef.h>
#include <stdint.h>

struct daemon;
struct op;

#define REQUEST_ROLE(role) (1u << (role))

struct request {
    int (*fn)(struct op *op); /* loop thread; a status, or SHD_PENDING with op_finish() to come */
    unsigned roles;           /* who may send it; 0: no session needed */
};

/* Serve one frame from identity. Loop thread; never blocks. */
void dispatch_frame(struct daemon *d, const uint8_t *identity, uint32_t identity_bytes,
                    const void *frame, size_t bytes);

#endif
