/* The text of a line of the log. */
#ifndef SHD_LOG_TEXT_H
#define SHD_LOG_TEXT_H

#include <stdarg.h>
#include <stddef.h>

/* What vsnprintf() writes, but that the value of a %s, which may come from a peer, is one value and
 * nothing else. Where fmt has an open quote it stays inside, elsewhere it gets quotes if it has a
 * blank, a '=' or what is escaped: '"' and '\' by a '\', control characters and what is no UTF-8 as
 * \n, \t, \r, \x1b. Cut at bytes, never inside an escape. Of conversions: d i u x c f g s, their
 * lengths, and %.*s. */
void log_text(char *text, size_t bytes, const char *fmt, va_list ap)
    __attribute__((format(printf, 3, 0)));

#endif
