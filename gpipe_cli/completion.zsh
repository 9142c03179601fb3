_gpipe() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    local -a candidates=(${(f)"$(COMP_LINE="$line" gpipe -sc query=zsh 2>/dev/null)"})
    if (( $#candidates )); then
        compadd -S '' -- ${(M)candidates:#*[=/]}
        compadd -- ${candidates:#*[=/]}
    else
        compset -P '*='
        _files
    fi
}
compdef _gpipe gpipe
