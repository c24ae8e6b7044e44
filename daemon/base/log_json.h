/* A line of the log as a JSON object. */
#ifndef SHD_LOG_JSON_H
#define SHD_LOG_JSON_H

/* {"time": time, "device": device, "level": level, ...} of a text "op=connect pid=12 why=\"...\"":
 * each key=value is a field, whole numbers as such; what has not that form is the field "text". The
 * caller's to free; NULL: no memory. */
char *log_json(const char *time, const char *device, const char *level, const char *text);

#endif
