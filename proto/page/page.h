/* The status page: one HTML file with its style and script, which asks only "status" beside where
 * it came from. It follows one daemon's document or {"daemons": [...]} of several. */
#ifndef SHD_PAGE_H
#define SHD_PAGE_H

#include <stddef.h>

extern const unsigned char page_html[]; /* not terminated */
extern const size_t page_html_bytes;

/* To be sent with it; the page itself says the same but for frames. */
#define PAGE_CONTENT_TYPE "text/html; charset=utf-8"
#define PAGE_SECURITY_POLICY                                                      \
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; " \
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "    \
    "frame-ancestors 'none'"

#endif
