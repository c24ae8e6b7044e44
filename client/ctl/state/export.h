/* shardctl export: a model's weights as safetensors, once or as training goes on. */
#ifndef SHD_CTL_EXPORT_H
#define SHD_CTL_EXPORT_H

int verb_export(int argc, char **argv);

#endif
